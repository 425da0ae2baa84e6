"""`deepspeed pretrain.py --model-parallel-size 2`; also under `torchrun`, or plain `python
pretrain.py`.
"""

from shardzoo.cli.pretrain import run_script

if __name__ == "__main__":
    run_script()
