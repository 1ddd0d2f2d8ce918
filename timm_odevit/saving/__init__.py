"""Models in files and on the Hugging Face Hub.

loading             saved weights and config.json, found and checked
save                save_pretrained: writes config.json and model.safetensors
cards               model cards
push                push_to_hub: uploads a model
"""
