"""`python finetune.py --model-name-or-path DIR --train-file FILE`; also under `deepspeed` or `torchrun`."""

from shardzoo.cli.finetune import main
from shardzoo.trainer.launch.environment import end_process

if __name__ == "__main__":
    end_process(main())
