"""Run a file that `odevit export` wrote, and measure its accuracy and speed. Needs neither timm_odevit nor timm.

python examples/exported.py model.onnx cifar100.npz --limit 1000

An .onnx file needs onnxruntime, a .pt2 file needs torch. Every file says how images are prepared for it.
"""
import argparse
import json
import time

import numpy as np
from PIL import Image


def load(file, threads=1):
    """A function from images [B, 3, H, W] to logits [B, classes], and the file's metadata."""
    if file.endswith('.onnx'):
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3  # it warns of the input `steps`
        session = onnxruntime.InferenceSession(file, options, providers=['CPUExecutionProvider'])
        about = session.get_modelmeta().custom_metadata_map

        def run(images):
            return session.run(None, {'images': images})[0]
    else:
        import torch
        torch.set_num_threads(threads)
        extra = {'metadata.json': ''}
        model = torch.export.load(file, extra_files=extra).module()
        about, like = json.loads(extra['metadata.json']), next(model.parameters())

        def run(images):
            with torch.no_grad():
                return model(torch.from_numpy(images).to(like)).float().cpu().numpy()
    return run, {key: json.loads(value) for key, value in about.items() if not key.startswith('onnx.')}


def prepare(images, about):
    """Turn uint8 images [B, S, S, 3] into the input [B, 3, H, W] of a file: resized, the centre cropped, normalised."""
    side, size = about['input_size'][-1], int(about['input_size'][-1] / about['crop_pct'])
    border = round((size - side) / 2)
    how = getattr(Image.Resampling, about['interpolation'].upper())
    pixels = np.stack([np.asarray(Image.fromarray(image).resize((size, size), how)) for image in images])
    pixels = pixels[:, border:border + side, border:border + side]
    normal = (pixels / 255 - about['mean']) / about['std']
    return np.ascontiguousarray(normal.transpose(0, 3, 1, 2), np.float32)


def main(file, data, limit=None, batch_size=50):
    run, about = load(file)
    arrays = np.load(data)
    x, y = arrays['x_test'][:limit], arrays['y_test'][:limit]
    images = prepare(x, about)
    found = np.concatenate([run(images[i:i + batch_size]) for i in range(0, len(x), batch_size)]).argmax(1)
    seconds = []
    for _ in range(50):
        start = time.process_time()  # of one thread, so that other programs matter less
        run(images[:1])
        seconds.append(time.process_time() - start)
    top1, ms = 100 * float((found == y).mean()), 1000 * float(np.median(seconds))
    steps = f", {about['steps']} steps" if about.get('steps') else ''
    print(f"{file}: {about['model']}{steps}, top-1 {top1:.1f} % of {len(x)} images, "
          f'{ms:.1f} ms of CPU time for one image')
    return top1, ms


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('file')
    parser.add_argument('data', help='.npz with uint8 images x_test [N, S, S, 3] and labels y_test [N]')
    parser.add_argument('--limit', type=int, help='use only this many images')
    args = parser.parse_args()
    main(args.file, args.data, args.limit)
