// Package translate turns a registry's services into Istio resources.
//
// Its functions are pure: equal input gives equal bytes, in every process and
// for any order of instances, ports and maps. There is no clock and no log;
// what cannot be used unchanged becomes a [Problem] with what was done and the
// remedy, and what is left out by intention is listed in [Result.LeftOut]. No
// input causes a panic, and the output passes istiod's validation, because
// istiod rejects silently.
//
// A service becomes a ServiceEntry, without endpoints and selector, and a
// WorkloadEntry for each instance that takes traffic. The spec of a
// WorkloadEntry carries [SelectorLabel], by which the ServiceEntry can select
// it.
//
// # Options
//
// The order of precedence is: the configuration, its preset, the adapter, the
// defaults. A preset is a set of options that reproduces the output of another
// bridge. Each problem names the field that would change it, unless only the
// registry can.
//
// # Names
//
// The host comes from a template, by default "{{.Name}}.{{.Registry}}". Upper
// case is lowered silently, or kept with translate.host_case, as Istio accepts
// it and policies name hosts with it. Illegal parts of a host are replaced and
// listed: an ASCII character becomes "-"; a name with characters beyond ASCII,
// or one that is too long, is reduced to a legal one with a hash of the
// original, so that names stay distinct; a last label of digits gets the prefix
// "x". If nothing of a label is left, the service is not served and is listed.
// Namespace and name follow the same rules. Without a template the name
// consists of the non-empty parts of the key (name, group, namespace,
// partition, datacenter) and is made legal silently. Different keys may still
// give one name ("web_a" and "web-a"); this package handles one service at a
// time, so the caller must detect that.
//
// A WorkloadEntry is named after its ServiceEntry and a hash of the service's
// key and the instance's ID, so its name depends on nothing else about the
// instance.
//
// # Ports
//
// By design an instance changes only its own WorkloadEntry: a changed
// ServiceEntry is a full push in the mesh, a changed endpoint is not.
//
// Ports stated by the service itself are served. Otherwise there is one service
// port for each port name among the instances, with the number that more than
// half of the instances with that name have. All instances count, healthy or
// not, disabled or not, so that a failing check changes no port. Without such a
// majority (dynamic ports) the number is translate.fallback_port, 80 by
// default, and for the n-th port by name the n-th number from there, or the
// next free one. translate.ports fixes numbers by name, which helps if the
// majority of a small service changes. A port without a name is named after its
// protocol.
//
// The ports map of an endpoint always states the instance's own number for each
// of its ports. If an instance lacks a port, Istio uses the service's number
// for it; that is listed. A single port of the service and a single port of an
// instance correspond whatever their names.
//
// With translate.port_policy "fixed" no number depends on the instances; with
// "instance" each of their numbers is a service port, which leads to the one
// port of every instance.
//
// # Protocol
//
// The first source that states a protocol decides: translate.ports; the
// registry's protocol of the service's port, then of the instances' ports; the
// port's name by Istio's convention ("http", "grpc-orders"); the service's
// metadata; the instances' metadata; the service's tags; the instances' tags.
// If instances differ, the most frequent value wins, then the first in
// alphabetical order, and the conflict is listed. Common spellings are
// recognized ("HTTP/1.1", "h2c", "triple"). An unknown protocol is listed and
// served as translate.protocol.default, tcp: HTTP guessed wrongly breaks other
// protocols, while tcp carries everything. With translate.protocol.guess,
// checks, names and numbers decide before that; a guess is listed.
//
// # Labels
//
// Metadata and tags of instances become labels of the WorkloadEntry. Illegal
// labels are made legal, and each changed key is listed once for the service. A
// tag of the form k=v, k:v or k|v is the label k; a bare tag is a label with
// the value true. An empty value gives no label. In a conflict the
// configuration wins over the cluster, the cluster over metadata, metadata over
// tags, a legal key over a changed one, then the alphabet; the loser is listed
// unless the configuration won. [SelectorLabel] and istio.io/rev cannot be set.
// Other labels with a meaning to Istio come from the configuration, as
// security.istio.io/tlsMode=istio for mutual TLS; those of the registry are
// left out and listed, unless [Options.Permit] has them.
//
// # Rules
//
// Rules in the syntax of Prometheus apply to a service after the templates and
// before names are made legal, and to an instance after the labels block
// selected labels and before these are made legal. An instance excluded by a
// rule, a selector or a network does not count for anything.
//
// # Traffic
//
// An instance takes traffic if it is not disabled, its health is at least
// translate.health (warning: only critical ones are excluded, as in Consul's
// DNS; unknown counts as passing), and its weight is not zero. Istio has no
// field for health and treats weight 0 as unset, so other instances are
// omitted. Instances that cannot be served (address, port) are omitted too. A
// service with instances, none of which takes traffic, becomes a ServiceEntry
// without endpoints: clients get an error at once. A service with neither
// instances nor ports of its own becomes nothing.
//
// Weights are served unchanged if all of a service are whole numbers. Otherwise
// all are multiplied by 100 and rounded, to at least 1, to preserve
// proportions. Weight 1 is Istio's default and not written.
//
// # Resolution and location
//
// Resolution is STATIC if all addresses of the service's instances, healthy or
// not, are IP addresses. Otherwise it is DNS, which accepts IP addresses too;
// each endpoint change is then a full push. Location is MESH_INTERNAL: the
// mesh's metrics count the services as its own, and clients use mutual TLS only
// to an endpoint that declares it (by the label security.istio.io/tlsMode or a
// service account) and plain text otherwise, so instances without a sidecar are
// reachable.
package translate
