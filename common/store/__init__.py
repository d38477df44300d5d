"""Runs in an object store: s3://, gs:// and what else fsspec knows, without rename and with the same promises."""
