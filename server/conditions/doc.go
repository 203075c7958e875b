// Package conditions lists what is wrong with a running bridge now.
//
// Each kind of condition is defined once, in [Kinds]: what it affects, what
// cures it, and how severe it is. The page, /readyz, the API, isthmus doctor,
// isthmus explain, the metric and the alerts all show the same [List], so that
// none of them is green while another is not.
package conditions
