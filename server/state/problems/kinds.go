package problems

import (
	"cmp"
	"regexp"
	"strconv"

	"github.com/isthmus-mesh/isthmus/internal/clip"
)

// Problem describes something that cannot be served.
type Problem struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
	// Field is the configuration field, as named in the reason, that resolves
	// the problem: "translate.host". Empty if only the registry can.
	Field string `json:"field,omitempty"`
}

// fieldInReason matches the fields that a reason names.
var fieldInReason = regexp.MustCompile(`\b(?:translate|config|limits|owns)(?:\.[a-z_]+(?:\[[0-9]+\])?)+`)

// FieldOf returns the last field that a reason names, without list indexes, or
// "".
func FieldOf(reason string) string {
	all := fieldInReason.FindAllString(reason, -1)
	if len(all) == 0 {
		return ""
	}
	return placeInList.ReplaceAllString(all[len(all)-1], "")
}

var placeInList = regexp.MustCompile(`\[[0-9]+\]`)

// Kinds of problems other than configuration fields.
const (
	OfRegistry  = "registry" // resolved only in the registry
	OfOthers    = "others"   // fields beyond MaxFields
	OfRejection = "refused"
	OfShadow    = "name taken"
	OfNetwork   = "addresses.cidr"
)

// MaxFields bounds the fields by which reasons are counted.
const MaxFields = 100

// Kinds counts reasons by kind.
type Kinds map[string]int

// count adds delta to the number of the kind of a reason; an empty one is none.
func (k Kinds) count(reason string, delta int) {
	if reason == "" {
		return
	}
	kind := cmp.Or(FieldOf(reason), OfRegistry)
	if _, known := k[kind]; !known && len(k) >= MaxFields {
		kind = OfOthers
	}
	k[kind] += delta
}

// reset sets all numbers to 0, so that their series remain.
func (k Kinds) reset() {
	for kind := range k {
		k[kind] = 0
	}
}

// ResourceID returns the id of a resource. An empty collection means that the
// kind is unknown.
func ResourceID(coll, name string) string {
	name = clip.Text(name, MaxID)
	if coll == "" {
		return "resource of unknown kind " + strconv.QuoteToASCII(name)
	}
	return "resource " + coll + " " + name
}
