// Package mutation plants defects in the bridge and looks whether the
// simulation finds them.
package mutation
