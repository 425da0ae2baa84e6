"""Files as every room reads and writes them: safe paths, strict JSON, digests, durable writes.

Modules:
    safe_paths   refuses names and links that lead out of a folder, and locks of files without a name
    strict_json  reads JSON of bounded size, without repeated keys
    strict_yaml  reads YAML of bounded size, without repeated keys or aliases
    hashing      computes the sha256 of files
    json_digest  lets a small JSON file carry the sha256 of its own contents
    expressions  bounds the time of foreign regular expressions
    durable      writes files that survive a crash
    printable    makes text of a foreign file safe for a terminal
    object_store    reaches `s3://`, `gs://`, `hf://` and `memory://` by fsspec
    working_copies  lets readers and writers of folders work on such stores by local copies
"""
