"""Measure a published student in every format as examples/exported.py does: writes hub/speed/formats.json, on one core.

    OMP_NUM_THREADS=1 python hub/tools/formats.py cifar100.npz NAME
"""
import copy
import sys
import tempfile
from pathlib import Path

import timm
import torch

from timm_odevit import export_model, quantize_
from timm_odevit.benchmark import processor
from timm_odevit.data.read import read_data
from timm_odevit.files import to_json, write_text

HUB = Path(__file__).parent.parent
sys.path.append(str(HUB.parent / 'examples'))
import exported  # noqa: E402

IMAGES = 1000
FORMS = ({}, {'int8': True}, {'bits': 4}, {'bits': 4, 'int8': True}, {'any_steps': True},
         {'any_steps': True, 'bits': 4, 'int8': True})

data, name = sys.argv[1:]
torch.set_num_threads(1)
model, rows = timm.create_model(name, pretrained=True).eval(), []
quantize_(small := copy.deepcopy(model), read_data(data, model).sample('train', 128)[0])
with tempfile.TemporaryDirectory() as folder:
    for number, (ending, form) in enumerate((*(('onnx', form) for form in FORMS), ('pt2', {}))):
        path = export_model(small if 'bits' in form else model, Path(folder, f'{number}.{ending}'), **form)
        top1, ms = exported.main(str(path), data, IMAGES)
        rows.append({'format': ending, **form, 'mb': path.stat().st_size / 1e6, 'top1': top1, 'ms': ms})
write_text(HUB / 'speed' / 'formats.json', to_json({
    'machine': f'{processor()}, one thread', 'model': name, 'images': IMAGES, 'rows': rows}))
