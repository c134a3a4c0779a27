"""Trains a small vision transformer on handwritten digits in transformers' Trainer.

torchrun --nproc-per-node 2 examples/transformers_digits.py
"""

from sklearn.datasets import load_digits
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

from lightning_pipesync import PipeSyncPlugin, PipeSyncTrainer

images, digits = load_digits(return_X_y=True)
images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
data = [{"pixel_values": image, "labels": digit} for image, digit in zip(images, digits, strict=True)]
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes))

args = TrainingArguments(
    "outputs/transformers_digits", per_device_train_batch_size=16, learning_rate=1e-3, num_train_epochs=5,
    logging_steps=50, save_strategy="no", report_to=[], use_cpu=True,
)  # fmt: skip
trainer = PipeSyncTrainer(model=model, args=args, train_dataset=data, pipesync=PipeSyncPlugin("dear"))
trainer.train()
trainer.accelerator.end_training()
