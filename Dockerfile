# Harness where there is no Linux: docker build -t harness . && docker run -it harness harness train experiment=quickstart
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends git make g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /harness
COPY . .
ARG TORCH=
RUN make install ${TORCH:+TORCH="$TORCH"}
ENV PATH=/harness/.venv/bin:$PATH
