// Package conflict decides what is served of a host that several services have,
// or of a name that several registries have.
//
// From contenders in order of precedence, and rules, follows a verdict on each:
// it is served, served beside another one, merged into it, or shadowed. The
// decision depends on nothing else, so every replica decides alike. A contender
// is compared with the ones before it that are served, those of its own
// registry first:
//
//	same name                    shadowed, whatever the rules say
//	same host, no common reader  served (exportTo)
//	same host, isolate           served beside, in another namespace
//	same host, priority          shadowed
//	same host, merge             merged, or shadowed where that is impossible
//
// A rule is for services of several registries, or for those of one that it
// names.
//
// [Decide] is that decision. [Hosts] finds the contenders that a change
// concerns, and has the verdicts. A [Merger] composes the endpoints of services
// that are merged.
package conflict
