# syntax=docker/dockerfile:1
# smg, in the version that make test-gateway tests:
#
#   docker build -f deploy/kubernetes/gateway.Dockerfile -t paceline-gateway:smg-1.13.0 deploy/kubernetes
FROM python:3.13-slim-trixie
RUN pip install --no-cache-dir smg==1.13.0 \
    && useradd --uid 10001 gateway
USER 10001
EXPOSE 8080
ENTRYPOINT ["smg"]
CMD ["launch", "--host", "0.0.0.0", "--port", "8080"]
