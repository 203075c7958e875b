// Package translate turns what a registry says of a service into Istio's resources.
//
// It consists of pure functions: the same input gives the same bytes, in every process and whatever the order of instances,
// ports and maps is. There is no clock and no log; what cannot be taken over as it is becomes a [Problem] that says what was
// done about it and how to mend it. No input makes it panic, and what comes out passes istiod's validation, because istiod
// tells nobody of what it rejects.
//
// One service becomes a ServiceEntry, without endpoints and without selector, and a WorkloadEntry for each instance that takes
// traffic. A WorkloadEntry carries [SelectorLabel] in its spec, by which the ServiceEntry can select it.
//
// # Names
//
// The host comes from a template, "{{.Name}}.{{.Registry}}" unless the adapter or the configuration says otherwise. Upper case becomes
// lower case without a word. Everything else that a host cannot have is mended and listed: an ASCII character becomes "-";
// what has characters beyond ASCII, or is too long, is cut to what is legal and gets a hash of the original, since many
// names would become one otherwise; a last label of digits gets an "x" before it. A label of which nothing is left cannot be
// mended: the service is left out and listed. Namespace and name follow the same rules. The name that comes without a template is
// made of the non-empty parts of the key (name, group, namespace, partition, datacenter) and mended without a word, since nobody
// chose it. Different keys may still become one name ("web_a" and "web-a"); this package sees one service at a time and leaves it
// to its caller to notice.
//
// A WorkloadEntry is named after its ServiceEntry and a hash of the service's key and the instance's ID, so it keeps its name while
// everything about the instance but its ID changes.
//
// # Ports
//
// The aim of these rules is that one instance changes its own WorkloadEntry and nothing else: a changed ServiceEntry is a full push
// in the mesh, a changed endpoint is not.
//
// If the service states ports of its own, these are served. Otherwise there is one service port for each port name among the
// instances, and its number is the one that more than half of the instances with that name have; healthy or not, disabled or not,
// they all count, so that a failing check changes no port. Where no number has such a majority (dynamic ports), it is
// translate.fallback_port, 80 by default, and for the n-th port by name the n-th number from there, or the next free one. translate.ports
// fixes numbers by name and is the cure for a small service whose majority moves. A port without a name is served under the name
// of its protocol.
//
// The endpoint's ports map always states the instance's own number for each of its ports. An instance that lacks a port which others have
// is reached on the service's number there, as Istio does; that is listed. Where the service states a single port and an
// instance has a single one, they belong together whatever they are called.
//
// # Protocol
//
// The first of these that says anything of the port decides: translate.ports; the registry's protocol of the service's port,
// then of the instances' ports; the port's name by Istio's convention ("http", "grpc-orders"); the service's metadata; the
// instances' metadata; the service's tags; the instances' tags. Where instances differ, most of them decide, of equals the one
// first in the alphabet, and it is listed. Common spellings are understood ("HTTP/1.1", "h2c", "triple"). What is
// unknown is listed and served as translate.protocol.default, tcp: a wrong guess of HTTP breaks other protocols, while tcp carries
// everything.
//
// # Labels
//
// Metadata and tags of instances become labels of the WorkloadEntry, mended where they are no legal labels, and each key that was
// mended is listed once for the service. A tag of the form k=v, k:v or k|v is the label k; a bare one is a label with the
// value true. An empty value says nothing and gives no label. Where two want the same label, the configuration wins over the cluster, the
// cluster over metadata, metadata over tags, a legal key over a mended one, then the alphabet; the loser is listed unless the
// configuration won.
// [SelectorLabel] and istio.io/rev cannot be set. Other labels that mean something to Istio pass: an instance that says
// security.istio.io/tlsMode=istio gets mutual TLS.
//
// # Traffic
//
// An instance takes traffic if it is not disabled, its health is at least translate.health (warning: only critical ones are left out, as
// Consul's DNS does; unknown counts as passing), and its weight is not zero. Istio has no field for health and takes weight 0 for
// unset, so the others are left out without a word: that is what their registry wants. Instances that
// cannot be served (address, port) are left out and listed. A service with instances, none of which takes traffic, is a
// ServiceEntry without endpoints: clients get an error at once. A service without instances, and without ports of its own, is nothing.
//
// Weights are served as they are while all of a service are whole numbers. If one is not, all are multiplied by 100 and
// rounded, to at least 1, so that proportions last. Weight 1 is Istio's default and not written.
//
// # Resolution and location
//
// Resolution is STATIC while all addresses of the service's instances, healthy or not, are IP addresses, else DNS, which takes IP addresses too;
// each endpoint change is then a full push. Location is MESH_INTERNAL: in the mesh's metrics the services are its own, and clients
// use mutual TLS only to an endpoint that says it can (by the label security.istio.io/tlsMode or a service account), plain
// text to all others, so instances without a sidecar are reached.
package translate
