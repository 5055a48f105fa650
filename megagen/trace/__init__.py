"""What every warp did and when: spans from device stamps, and the views, pages and files made of them."""
