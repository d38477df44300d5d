"""Sends what a run records to Weights & Biases, MLflow or trackio. A training needs none of it."""
