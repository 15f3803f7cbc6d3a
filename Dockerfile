# CUDA image for cluster jobs: `docker build -t lit-asyncrl . && docker run --gpus all -v $PWD/runs:/workspace/runs lit-asyncrl fit --config vcpo`
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    HF_HUB_OFFLINE=1 \
    TOKENIZERS_PARALLELISM=false \
    PATH=/opt/venv/bin:$PATH

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv \
    && useradd --create-home --uid 10001 trainer

# Dependencies first: this layer is rebuilt only when pyproject.toml changes.
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
RUN mkdir -p lit_asyncrl configs \
    && touch lit_asyncrl/__init__.py \
    && pip install . \
    && pip uninstall --yes lit-asyncrl

COPY lit_asyncrl lit_asyncrl
COPY configs configs
RUN pip install --no-deps .

RUN mkdir /workspace && chown trainer:trainer /workspace
WORKDIR /workspace
USER trainer
ENTRYPOINT ["lit-asyncrl"]
CMD ["--help"]
