"""The one reader and writer of tensors on disk. It knows no model.

What a tensor on disk is:
    dtypes              names and sizes of the element types
    stored_tensor       where a tensor lies in a file: type, shape, offset
    safetensors_header  reads, checks and makes the headers of safetensors files
    layout              which stored tensors hold which part of a model's parameter

Folders:
    checkpoint          opens a folder of any format and lists its tensors
    formats/            other programs' formats, each with reader, writer and names in one file
    manifest            `manifest.json` of a folder of shards
    folder_files        the other files of a folder, and the digests of a training checkpoint
    hub                 finds a folder on disk or on the Hugging Face Hub

Bytes:
    file_io             reads, writes, hashes and compares the bytes of stored tensors
    tensor_reader       reads stored tensors, or a rank's parts of them, as tensors of torch
    rank_files          the files of tensor-parallel ranks, each written by several ranks together
    planned_file        plans a new file before its tensors are written
"""
