"""`python finetune.py --model-name-or-path DIR --train-file FILE`; also under `deepspeed` or `torchrun`."""

import sys

from shardzoo.cli.finetune import main

if __name__ == "__main__":
    sys.exit(main())
