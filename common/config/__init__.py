"""What a run is configured with: typed, checked, and free of torch."""
