"""`python finetune.py --model-name-or-path DIR --train-file FILE`; also under `deepspeed` or
`torchrun`.
"""

from shardzoo.cli.finetune import run_script

if __name__ == "__main__":
    run_script()
