"""An adapter of Isthmus in Python: it publishes the services of a JSON
document that it reads from a URL again and again. See README.md."""

import base64
import datetime
import ipaddress
import json
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from isthmus.plugin.v1 import adapter_pb2 as pb
from isthmus.plugin.v1 import adapter_pb2_grpc as rpc
from mcp.v1alpha1.resource_pb2 import Resource
from networking.v1alpha3.service_entry_pb2 import ServiceEntry
from networking.v1alpha3.workload_entry_pb2 import WorkloadEntry

SERVICE, WORKLOAD = "networking.istio.io/ServiceEntry", "networking.istio.io/WorkloadEntry"
BATCH = 1000  # parts of a message, which may have 16 MiB
SIGN_OF_LIFE = 2  # seconds; the contract wants one every 5
LARGEST = 64 << 20  # bytes of a document
CREATED = 4102444800  # 2100-01-01: constant, and later than anything else
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["url"],
    "properties": {
        "url": {"type": "string", "description": "Where the document is: http, https or file."},
        "interval": {"type": "number", "default": 5, "description": "Seconds between two readings."},
    },
}


def log(level, message):
    """A line of JSON on standard error is a record in the bridge's log."""
    print(json.dumps({"@level": level, "@message": message}), file=sys.stderr, flush=True)


class State(NamedTuple):
    """What is known of the registry: replaced as a whole, never changed."""
    resources: dict = {}  # Upsert by (collection, name), services first
    kept: frozenset = frozenset()  # (collection, name) of what is there but was never well-formed
    problems: dict = {}  # reason by id
    error: str = ""  # why the registry cannot be followed at the moment
    complete: bool = False  # there was a full listing
    services: int = 0
    instances: int = 0


def need(ok, reason):
    if not ok:
        raise ValueError(reason)


def label(thing, field):
    value = thing.get(field) if isinstance(thing, dict) else None
    need(isinstance(value, str) and re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", value),
         f"{field} {value!r} must be lower-case letters, digits and dashes")
    return value


def service_entry(service, host):
    port, protocol = service["port"], service.get("protocol", "TCP")
    need(isinstance(port, int) and 0 < port < 65536, "port must be 1 to 65535")
    need(protocol in ("HTTP", "HTTP2", "GRPC", "TCP"), "protocol must be HTTP, HTTP2, GRPC or TCP")
    entry = ServiceEntry(hosts=[host], location=ServiceEntry.MESH_INTERNAL, resolution=ServiceEntry.STATIC)
    entry.ports.add(number=port, name=protocol.lower(), protocol=protocol)
    return entry  # without endpoints or selector: the bridge adds what a sink needs


def workload_entry(service, instance):
    port = instance.get("port", service["port"])
    need(isinstance(port, int) and 0 < port < 65536, "port must be 1 to 65535")
    return WorkloadEntry(
        address=str(ipaddress.ip_address(instance["address"])), ports={service.get("protocol", "TCP").lower(): port},
        weight=instance.get("weight", 0), labels=instance.get("labels", {}), locality=instance.get("locality", ""))


def translate(document, registry, old):
    """Returns the state that a document means. What is wrong with a resource is
    a problem, and its last good version stays; without names nothing can stay,
    so a document with a nameless part is refused as a whole."""
    need(isinstance(document, dict) and isinstance(document.get("services"), list), 'it must be {"services": [...]}')
    resources, kept, problems, instances = {}, set(), {}, 0

    def take(collection, name, service, thing, make):
        key = (collection, f"{registry}/{name}")
        need(key not in resources and key not in kept, f"{thing} is there twice")
        try:
            resource = Resource()
            resource.metadata.name, resource.metadata.create_time.seconds = key[1], CREATED
            resource.body.Pack(make(), deterministic=True)
            # Equal content must be equal bytes, or all is sent again and again.
            resources[key] = pb.Upsert(resource=resource.SerializeToString(deterministic=True), service=f"{registry}/{service}")
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            problems[thing] = f"{type(e).__name__}: {e}; its last good version is kept, if there was one"
            if key in old.resources:
                resources[key] = old.resources[key]
            else:  # the bridge may have one of an earlier process
                kept.add(key)
        return key in resources

    for service in document["services"]:
        name = label(service, "name")
        known = take(SERVICE, name, name, f"service {name}", lambda: service_entry(service, f"{name}.{registry}"))
        for instance in service.get("instances") or []:
            instances += 1
            ident = label(instance, "id")
            if known:
                take(WORKLOAD, f"{name}.{ident}", name, f"instance {name}/{ident}", lambda: workload_entry(service, instance))
    return State(resources, frozenset(kept.difference(resources)), problems, "", True, len(document["services"]), instances)


def messages(old, new):
    """Yields what leads a bridge from one state to another: removals first, then
    upserts, the rest with the last message. Nothing new is one sign of life."""
    there = new.kept.union(new.resources)
    parts = [("removals", pb.Removal(collection=c, name=n)) for c, n in [*old.resources, *old.kept] if (c, n) not in there]
    parts += [("upserts", u) for key, u in new.resources.items() if old.resources.get(key) != u]
    parts += [("kept", pb.Kept(collection=c, name=n)) for c, n in new.kept - old.kept]
    # After its instances: what else the bridge has kept of the service goes then.
    parts += [("relisted", n) for c, n in old.kept if c == SERVICE and (c, n) in new.resources]
    parts += [("problems", pb.Problem(id=i)) for i in old.problems if i not in new.problems]
    parts += [("problems", pb.Problem(id=i, reason=r)) for i, r in new.problems.items() if old.problems.get(i) != r]
    for start in range(0, len(parts) or 1, BATCH):
        message = pb.WatchResponse()
        for field, part in parts[start:start + BATCH]:
            getattr(message, field).append(part)
        if start + BATCH >= len(parts):
            message.synced = new.complete and not old.complete
            if new.error != old.error:
                message.status.CopyFrom(pb.Status(error=new.error))
        if message.ListFields():
            message.services, message.instances = new.services, new.instances
        yield message


class Adapter(rpc.AdapterServiceServicer):
    """The contract's service. Its calls come from several threads."""

    def __init__(self, stop):
        self.stop, self.registry, self.config = stop, "", None
        self.changed = threading.Condition()
        self.state = State()  # guarded by changed
        self.watches, self.last_watch = 0, None  # how many, and when the last ended; guarded by changed

    def Describe(self, request, context):
        return pb.DescribeResponse(name="json", version="1.0.0", config_schema=json.dumps(SCHEMA).encode(), collections=[SERVICE, WORKLOAD])

    def Configure(self, request, context):
        if self.config:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "configure: the plugin is configured already")
        config = json.loads(request.config)
        wrong = {f"config.{field}": "unknown field" for field in config if field not in SCHEMA["properties"]}
        url, interval = config.get("url"), config.get("interval", 5)
        if not isinstance(url, str) or not url.startswith(("http://", "https://", "file://")):
            wrong["config.url"] = "is required, and begins with http://, https:// or file://"
        if not isinstance(interval, (int, float)) or not 0 < interval <= 3600:
            wrong["config.interval"] = "must be a number of seconds, more than 0 and at most 3600"
        if json.loads(request.translate):
            wrong["translate"] = "the adapter has no such settings; remove the block"
        if not wrong:
            self.registry, self.config = request.registry, (url, interval)
        return pb.ConfigureResponse(violations=[pb.Violation(field=f, reason=r) for f, r in sorted(wrong.items())])

    def Watch(self, request, context):
        if not self.config:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "watch: the plugin is not configured")
        with self.changed:
            if not self.watches and self.last_watch is None:
                threading.Thread(target=self.follow, daemon=True).start()
            self.watches += 1
        context.add_callback(self.watch_ended)
        sent = State()
        while context.is_active():
            with self.changed:
                self.changed.wait_for(lambda: self.state is not sent or not context.is_active(), SIGN_OF_LIFE)
                state = self.state
            yield from messages(sent, state)
            sent = state

    def watch_ended(self):
        with self.changed:
            self.watches, self.last_watch = self.watches - 1, time.monotonic()
            self.changed.notify_all()

    def abandoned(self):
        """Reports whether the bridge's stream ended and no other one began."""
        with self.changed:
            return self.watches == 0 and self.last_watch is not None and time.monotonic() - self.last_watch > 3

    def follow(self):
        """Reads the document until the end. While that fails, the last state
        stays, with the reason."""
        url, interval = self.config
        while not self.stop.is_set():
            try:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    text = answer.read(LARGEST + 1)
                need(len(text) <= LARGEST, f"it has more than {LARGEST} bytes")
                state = translate(json.loads(text), self.registry, self.state)
            except Exception as e:  # whatever it is: nothing of what is known goes
                state = self.state._replace(error=f"read {url}: {e}")
            if state != self.state:
                with self.changed:
                    self.state = state
                    self.changed.notify_all()
            self.stop.wait(interval)


def certificate():
    """Returns a key and a certificate for this process alone, as PEM, and the
    certificate as the handshake has it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    cert = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=1)).not_valid_after(now + datetime.timedelta(days=3650))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(key, hashes.SHA256()))
    key_pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    der = base64.b64encode(cert.public_bytes(serialization.Encoding.DER)).decode().rstrip("=")
    return key_pem, cert.public_bytes(serialization.Encoding.PEM), der


def main():
    if os.environ.get("ISTHMUS_ADAPTER") != "8b1f6a37c2d94e05":
        sys.exit("This is json, an adapter of Isthmus. The bridge starts it for a registry of type json.")
    if "1" not in os.environ["PLUGIN_PROTOCOL_VERSIONS"].split(","):
        sys.exit(f"The bridge speaks versions {os.environ['PLUGIN_PROTOCOL_VERSIONS']} of the contract, this adapter version 1.")
    stop, parent = threading.Event(), os.getppid()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    key, cert, cert_der = certificate()
    adapter = Adapter(stop)
    server = grpc.server(ThreadPoolExecutor(max_workers=8))
    rpc.add_AdapterServiceServicer_to_server(adapter, server)
    socket = os.path.join(os.environ["PLUGIN_UNIX_SOCKET_DIR"], "json.sock")
    # Only the bridge that started this process has the key to its certificate.
    server.add_secure_port(f"unix:{socket}", grpc.ssl_server_credentials(
        [(key, cert)], root_certificates=os.environ["PLUGIN_CLIENT_CERT"].encode(), require_client_auth=True))
    server.start()
    print(f"1|1|unix|{socket}|grpc|{cert_der}", flush=True)  # nothing else goes to standard output
    # The end of the bridge is the end of the adapter.
    while not (stop.wait(1) or adapter.abandoned() or os.getppid() != parent):
        pass
    log("debug", "the adapter ends")
    stop.set()
    server.stop(grace=None).wait(2)


if __name__ == "__main__":
    main()
