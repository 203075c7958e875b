// Package conflict decides what is served of a host or a name that several
// registries have.
//
// From contenders in order of precedence, and rules, follows a verdict on each:
// it is served, served beside another one, merged into it, or shadowed. The
// decision depends on nothing else, so every replica decides alike. A contender
// is compared with the ones before it that are served:
//
//	same name                    shadowed, whatever the rules say
//	same host, no common reader  served (exportTo)
//	same host, isolate           served beside
//	same host, priority          shadowed
//	same host, merge             merged, or shadowed where that is impossible
//
// It has no lock and no state.
package conflict
