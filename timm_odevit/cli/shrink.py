"""odevit shrink"""
import os
from pathlib import Path
from typing import Any

from ..shrinking.run import shrink as run
from .models import TOWERS, load, refuse_existing


def shrink(args: Any) -> None:
    """Make a small student of a model, and say whether it is worth it.

    model
    images  IMAGES unless they are the classes of the model
    out  folder for the student, the files that were compared, and the verdict
    --size SIZE  size of the student, such as 25%, 3M parameters or 4MB (default: one that suits the images and minutes)
    --keep SHARE%  instead of --size: find the smallest student that keeps this share of the accuracy, such as 95%
    --minutes M [60]  minutes to spend
    --checkpoint --img-size
    --embedding  treat the model's outputs as embeddings, not logits; always on for image towers
    --resume  continue the run in the folder
    --quiet
    """
    if not args.resume:
        refuse_existing(args.out, '--resume')
    os.environ.setdefault('KINETO_LOG_LEVEL', '6')  # read when the profiler first starts: lower levels are noise
    model = load(args.model, args)
    try:
        verdict = run(model, args.images, args.out, size=args.size, keep=args.keep, minutes=args.minutes,
                      embedding=args.embedding or args.model.startswith(TOWERS), resume=args.resume,
                      progress=not args.quiet)
    except KeyboardInterrupt:
        if (best := Path(args.out, 'student', 'best')).exists():
            print(f'\nThe best student so far is in {best}. To continue: the same command with --resume')
        raise
    print(f'\n{verdict}')
