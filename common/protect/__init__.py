"""What finds a rank or a device that is wrong. A training needs none of it."""
