// Package doctor finds what keeps istiod and a bridge from working together.
//
// It looks at the mesh configuration, at the debug pages of an istiod, and at
// the admin API of a bridge. Each check is a function of what was read to
// findings; it changes nothing.
package doctor
