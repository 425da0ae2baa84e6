"""The formats of other programs: a file each, with its reader, its writer and its names.

torch_file  files of `torch.save`, which the other two formats consist of
megatron    folders of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX
dcp         folders of `torch.distributed.checkpoint`, also megatron-core's
"""
