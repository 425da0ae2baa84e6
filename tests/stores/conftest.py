from checkpoint_fixtures import gpt2_folder, hashes, zoo
from object_stores import bucket, memory_bucket, objects_folder, s3, s3_bucket, s3_server

__all__ = [
    "bucket",
    "gpt2_folder",
    "hashes",
    "memory_bucket",
    "objects_folder",
    "s3",
    "s3_bucket",
    "s3_server",
    "zoo",
]
