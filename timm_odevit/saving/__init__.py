"""Models in files and on the Hugging Face Hub.

loading   saved weights and config.json, found and checked
cards     model cards
save      save_pretrained: writes config.json and model.safetensors; push_to_hub: uploads them
"""
