"""Runs in an object store: s3://, without rename and with the same promises. You may delete this folder."""
