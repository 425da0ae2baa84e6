"""The formats of other programs: a file each, with its reader, its writer and its names.

torch_file         reads files of `torch.save`, which the other two formats consist of
legacy_torch_file  reads those from before torch 1.6
torch_file_writer  plans those that a conversion writes
megatron           folders of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX
dcp                folders of `torch.distributed.checkpoint`, also megatron-core's
"""
