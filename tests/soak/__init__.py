"""Long trials of what runs promise, which `make soak` starts."""
