// Package nacos is the adapter that follows the naming service of Nacos,
// versions 1.x to 3.x.
//
// # How it follows
//
// One gRPC connection carries the adapter's requests and a stream of requests
// of the server, each of which is acknowledged. Every service is subscribed, so
// a change of one instance is one push of that service. Services are discovered
// by the first of these methods that works:
//
//   - a fuzzy watch (3.x), by which the server announces each service that is
//     added or removed. By default a server announces at most 500 services per
//     pattern; beyond that the next method is used in addition;
//   - a paged list for each group, if the configuration names the groups;
//   - a paged list of everything over HTTP, if groups are globs.
//
// If the server has no gRPC (1.x, or a closed port), lists and instances are
// polled over HTTP.
//
// # What is believed
//
// What an answer contains is always applied. What it lacks is removed only if
// the answer can be trusted:
//
//   - an error, or a list that was not read to its end, removes nothing;
//   - an answer without instances for a service that had some is confirmed by a
//     query;
//   - a service is removed when it is missing in a complete list and a query
//     returns no instance;
//   - after an outage or a change of server, known instances are retained until
//     an answer of the new connection contains them or remove_grace has passed:
//     Nacos clients register their instances again;
//   - a namespace with an empty list counts as empty only if it is known to
//     exist;
//   - the first listing completes without a refused service only if another
//     service is served at that moment: then the refusal does not concern the
//     credentials.
//
// While one of these rules retains anything, the registry is degraded and
// states the reason.
package nacos
