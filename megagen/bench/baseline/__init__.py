"""What a fused layer is measured against: the same layer op by op, in kernels of torch and Triton."""
