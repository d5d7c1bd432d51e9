# Harness where there is no Linux:
#
#     docker build -t harness .
#     docker run -it harness harness train experiment=quickstart
#
# Give docker run -v "$PWD/runs:/harness/runs" to keep the runs, and --gpus all to use GPUs.
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends git make g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /harness
COPY . .
RUN make install
ENV PATH=/harness/.venv/bin:$PATH
