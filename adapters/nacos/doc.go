// Package nacos is the adapter that follows the naming service of Nacos, versions 1.x to 3.x.
//
// # How it follows
//
// One gRPC connection carries everything: requests of ours on it, and a stream on which the server sends requests of its own, each of which is
// answered. Every service is subscribed, so a change of one instance is one push of that service.
// Which services there are is known by one of these, the first that works:
//
//   - a fuzzy watch (3.x), by which the server tells each service that comes or goes. A server tells of 500 services per pattern at most
//     unless it is configured otherwise; beyond that the next one is used as well;
//   - a paged list for each group, where the groups are named in the configuration;
//   - a paged list of everything over HTTP, where groups are globs.
//
// Where the server speaks no gRPC (1.x, or a closed port), lists and instances are polled over HTTP.
//
// # What is believed
//
// What an answer holds is always believed. What it lacks is believed only where it can be trusted:
//
//   - an error of any kind, and a list that was not read to its end, removes nothing;
//   - an answer without instances for a service that had some is confirmed by a query;
//   - a service is removed when it is missing in a complete list and a query says that it has no instance;
//   - after an outage, and after a move to another server, what was known stays until an answer of the new connection shows it, or
//     remove_grace has passed: the clients of Nacos register again what they run;
//   - a namespace that lists nothing counts as empty only if it is known to exist;
//   - the first listing does without a service that is refused only where another one is shown at that moment: then it is not who asks that is refused.
//
// While any of this holds something back the registry is degraded, with the reason in words.
package nacos
