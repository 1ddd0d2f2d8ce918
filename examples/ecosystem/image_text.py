"""open_clip and transformers: the image tower of a CLIP converted, and put back beside its text tower.

The models here are small and random; load yours with open_clip.create_model or CLIPModel.from_pretrained.
"""
import copy

import open_clip
import torch
import transformers

from timm_odevit import calibrate_, convert_, evaluate_embeddings, from_open_clip, from_transformers, put_tower_


def main():
    images, labels = torch.randn(16, 3, 64, 64), torch.arange(16) % 2
    clip = open_clip.CLIP(
        32, dict(layers=4, width=64, head_width=16, patch_size=16, image_size=64),
        dict(context_length=77, vocab_size=49408, width=32, heads=2, layers=1)).eval()
    tokens = open_clip.get_tokenizer('ViT-B-16')(['a photo of a cat', 'a photo of a dog'])
    with torch.no_grad():
        names = clip.encode_text(tokens)
    found = {'open_clip': converted(clip, from_open_clip(clip), images, labels, names)}

    sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)
    config = transformers.CLIPConfig(
        vision_config=dict(sizes, image_size=64, patch_size=16), text_config=sizes, projection_dim=32)
    program = transformers.CLIPModel(config).eval()
    with torch.no_grad():
        names = program.get_text_features(input_ids=tokens).pooler_output
    found['transformers'] = converted(program, from_transformers(program), images, labels, names)
    return found


def converted(program, tower, images, labels, names):
    teacher = copy.deepcopy(tower)
    convert_(tower, phases=2)
    calibrate_(tower, teacher, images, epochs=4, progress=False)
    put_tower_(program, tower)
    found = evaluate_embeddings(tower, (images, labels), class_embeddings=names, teacher=teacher)
    print(found)
    return found.results[-1]


if __name__ == '__main__':
    main()
