"""The models, data sets and environments of the recipes; the plumbing of a run is one folder up."""
