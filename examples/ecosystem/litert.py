"""LiteRT, for phones: .tflite files in float, int8 and int4, beside ONNX. Tested with litert-torch 0.10.0.

    python litert.py cifar100.npz
"""
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import litert_torch
import numpy as np
import timm
import torch
from ai_edge_litert.interpreter import Interpreter
from ai_edge_quantizer import quantizer, recipe
from litert_torch.fx_infra import decomp

from timm_odevit import export_model
from timm_odevit.benchmark import times_in_turns
from timm_odevit.data.read import read_data
from timm_odevit.export.files import load_exported

FORMS = {'int8': recipe.dynamic_wi8_afp32, 'int4': recipe.dynamic_wi4_afp32, 'int4_groups': recipe.dynamic_wi4b32_afp32}


def add(x, y, alpha=1):
    """x + alpha y: the steps of a solver, whose alpha the converter does not take."""
    return NotImplemented if alpha == 1 else x + alpha * y


def load(path):
    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    (of,), (to,) = interpreter.get_input_details(), interpreter.get_output_details()

    def run(image):
        interpreter.set_tensor(of['index'], image.numpy())
        interpreter.invoke()
        return interpreter.get_tensor(to['index'])
    return run


def main(data, name='odevit_tiny_native_three_patch16_128.deit_tiny_k6_cifar100', limit=1000, rounds=50):
    torch.set_num_threads(1)
    model = timm.create_model(name, pretrained=True).eval()
    images, labels = read_data(data, model).sample('test', limit)
    with TemporaryDirectory() as folder:
        whole = Path(folder, 'float.tflite')
        decomp.add_pre_convert_decomp(torch.ops.aten.add.Tensor, add)
        litert_torch.convert(model, (images[:1],)).export(str(whole))
        runs = {whole: load(whole)}
        for form, settings in FORMS.items():
            smaller = quantizer.Quantizer(str(whole))
            smaller.load_quantization_recipe(settings())
            path = whole.with_stem(form)
            smaller.quantize().export_model(str(path))
            runs[path] = load(path)
        for form in ({}, {'int8': True}):
            path = export_model(model, Path(folder, f"{'int8' if form else 'float'}.onnx"), **form)
            runs[path] = load_exported(path)[0]
        times = np.median(times_in_turns([lambda run=run: run(images[:1]) for run in runs.values()], rounds), axis=1)
        rows = []
        for (path, run), seconds in zip(runs.items(), times, strict=True):
            right = [int(np.argmax(run(image)) == label) for image, label in zip(images.split(1), labels, strict=True)]
            rows.append((path.name, path.stat().st_size / 1e6, 100 * np.mean(right), 1000 * seconds))
            print('{}: {:.2f} MB, top-1 {:.1f} %, {:.2f} ms of CPU time for one image'.format(*rows[-1]))
    return rows


if __name__ == '__main__':
    main(sys.argv[1])
