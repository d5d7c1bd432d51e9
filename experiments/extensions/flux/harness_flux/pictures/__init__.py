"""Pictures with captions: their sources, encoders, latents, sampling and sample sheets."""
