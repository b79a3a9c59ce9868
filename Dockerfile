# A container for SageMaker: `train` runs a training job, `serve` an endpoint.
#   docker build -t vramfit .
# torch's wheels bring CUDA with them: the host needs a driver and nothing else.
FROM python:3.12-slim

WORKDIR /opt/vramfit
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt ".[sagemaker]"

ENV PYTHONUNBUFFERED=1 \
    HF_HUB_DISABLE_TELEMETRY=1
LABEL com.amazonaws.sagemaker.capabilities.accept-bind-to-port=true
EXPOSE 8080
WORKDIR /opt/ml
# exec form: SIGTERM must reach Python, which writes a checkpoint
ENTRYPOINT ["python", "-m", "vramfit.integrations.sagemaker"]
