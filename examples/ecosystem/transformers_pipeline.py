"""transformers: load a saved folder or a Hub repository as its image classifier. Tested with 5.23.0."""
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

import timm_odevit  # noqa: F401  registers the models with timm, through which transformers builds them

FOLDER = Path(__file__).parents[2] / 'hub' / 'odevit_tiny_native_patch16_128.deit_tiny_cifar100'


def main(folder=FOLDER):
    model = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    classify = pipeline('image-classification', model=model, image_processor=processor, device='cpu')
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    answers = classify(image, top_k=3)
    print(answers)

    reference = timm.create_model(f'local-dir:{folder}', pretrained=True).eval()
    pixels = processor(image)['pixel_values']
    with torch.no_grad():
        same = torch.equal(model(pixels).logits, reference(pixels))
    print('the same logits as timm:', same)
    model.timm_model.blocks.steps = 3    # fewer steps cost less
    return answers, same


if __name__ == '__main__':
    main()
