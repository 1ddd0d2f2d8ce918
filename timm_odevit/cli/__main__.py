"""python -m timm_odevit.cli"""
import sys

from . import main

sys.exit(main())
