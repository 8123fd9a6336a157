"""Metric of the listeners' certificate. No labels."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.clients.certificate import ListenerCertificate


class CertificateMetrics(Collector):
    """Registers itself as a collector; without TLS its metric has no sample."""

    def __init__(self, registry: CollectorRegistry, certificate: ListenerCertificate) -> None:
        self._certificate = certificate
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "warmroute_tls_certificate_not_after_timestamp_seconds",
            "End of validity of the listeners' certificate, or of one in its chain that ends earlier",
        )
        if self._certificate.ends_unix_s is not None:
            family.add_metric([], self._certificate.ends_unix_s)
        yield family
