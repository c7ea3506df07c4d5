"""Keep a store's bytes: in a local folder, on S3, or on any other file system of fsspec."""
