"""What the recipes train, and on what: models, data sets, environments. How a run is run is one folder up."""
