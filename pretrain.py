"""`deepspeed pretrain.py --model-parallel-size 2`; also under `torchrun`, or plain `python pretrain.py`."""

import sys

from shardzoo.cli.pretrain import main

if __name__ == "__main__":
    sys.exit(main())
