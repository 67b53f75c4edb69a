"""Long trials of what runs promise; `make soak ARGS=PART` starts one, and pytest collects none."""
