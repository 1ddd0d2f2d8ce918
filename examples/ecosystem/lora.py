"""peft: LoRA on the shared block: one adapter for all K evaluations, and none once merged. Tested with 0.21.2."""
import timm
import torch
from peft import LoraConfig, get_peft_model

from timm_odevit import save_pretrained


def main(name='odevit_tiny_native_three_patch16_128.deit_tiny_k12_cifar100', out=None):
    model = timm.create_model(name, pretrained=True)
    config = LoraConfig(r=4, target_modules=r'blocks\.shared\..*\.(qkv|proj|fc1|fc2)', modules_to_save=['head'])
    adapted = get_peft_model(model, config)
    adapted.print_trainable_parameters()
    optimizer = torch.optim.AdamW((p for p in adapted.parameters() if p.requires_grad), lr=1e-3)
    images, labels = torch.randn(8, 3, 128, 128), torch.arange(8)    # yours, normalised for the model
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(adapted(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print('loss:', losses)
    adapted.eval()
    with torch.no_grad():
        expected = adapted(images)
        merged = adapted.merge_and_unload().eval()    # a timm model again
        difference = (merged(images) - expected).abs().max().item()
    print('merging changed the logits by', difference)
    if out is not None:
        save_pretrained(merged, out)
    return losses, difference


if __name__ == '__main__':
    main()
