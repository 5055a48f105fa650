"""megagen: megakernels from a page of Python."""
