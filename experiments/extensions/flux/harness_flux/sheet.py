"""The sample sheet of a validation: pictures of held-out captions, in one PNG file."""

from collections import ChainMap

import numpy as np

from harness.train.observer import Periodic, Row, Run
from harness.util.errors import ConfigError
from harness_flux.config import SamplingConfig, flow_of, flux_of, sheet_of
from harness_flux.model import Flux
from harness_flux.objective import ImageBatch, normals
from harness_flux.pictures.config import pictures_of
from harness_flux.pictures.encoders import Embeddings, as_bytes, build_autoencoder
from harness_flux.pictures.loader import PictureLoader
from harness_flux.sampling import NOISE, sample_latents, write_sheet


class SampleSheet(Periodic):
    """Samples pictures of the first validation captions at each validation.

    Raises:
        ConfigError: the autoencoder cannot decode the model's latents.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run, run.job.validation.interval)
        job = run.job
        self._folder = run.folder / "samples"
        options = pictures_of(job.data)
        self._autoencoder = build_autoencoder(options, run.engine.device)
        channels = self._autoencoder.channels
        wanted = flux_of(job.model).latent_channels
        if channels != wanted:
            rule = f"its latents have {channels} channels, and model.options.latent_channels is {wanted}"
            works = "the autoencoder that made the latents, or validation.options.pictures=0"
            raise ConfigError("data.options.autoencoder", options.autoencoder, rule, works)

    def act(self, step: int) -> Row:
        """Sample the pictures, and write them on rank 0."""
        job = self.run.job
        engine = self.run.engine
        loader = self.run.validation_loader
        sheet = sheet_of(job)
        flow = flow_of(job)
        mesh = engine.mesh
        count = sheet.pictures
        assert isinstance(loader, PictureLoader)
        loader.reset()
        batch: ImageBatch = loader.next()
        rows = min(-(-count // job.parallelism.data_parallel), len(batch.mean_BCHW))
        numbers = batch.numbers_B[:rows].tolist()
        noise = normals(NOISE, job.training.seed, numbers, batch.mean_BCHW.shape[1:], engine.device)
        captions = Embeddings(batch.text_BLD[:rows], batch.pooled_BP[:rows])
        settings = SamplingConfig(steps=sheet.picture_steps, guidance=flow.guidance)
        part = engine.parts[0]
        assert isinstance(part, Flux)
        latents = sample_latents(part, mesh, flow, settings, noise, captions)
        own = dict[int, np.ndarray]()
        if mesh.rank("tp") == 0 and mesh.rank("cp") == 0:
            own |= zip(numbers, as_bytes(self._autoencoder.decode(latents)), strict=True)
        pictures = ChainMap(*self.run.ranks.gather(own))
        shown = sorted(pictures)[:count]
        path = self._folder / f"step-{step}.png"
        if self.run.ranks.rank == 0:
            self._folder.mkdir(exist_ok=True)
            texts = [loader.caption(number) for number in shown]
            write_sheet(path, [pictures[number] for number in shown], texts)
        self.run.message(f"step {step}: {len(shown)} sampled pictures in {path}")
        return {}
