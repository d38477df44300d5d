"""Where the time of a step goes. A training needs none of it."""
