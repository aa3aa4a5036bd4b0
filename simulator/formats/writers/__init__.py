"""Writers of predictions: one module per format."""
