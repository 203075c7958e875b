package conditions

import (
	"fmt"
	"strings"
)

// Kind identifies a kind of condition: "registry-not-live". It is the label of
// the metric and the anchor in the runbooks.
type Kind string

// The kinds, the most severe first within each subject.
const (
	TypesWaiting       Kind = "types-waiting"
	RegistryNotLive    Kind = "registry-not-live"
	RegistrySilent     Kind = "registry-silent"
	PluginRestarts     Kind = "plugin-restarts"
	ListingIncomplete  Kind = "listing-incomplete"
	ServesRestored     Kind = "serves-restored"
	ServesWithout      Kind = "serves-without"
	RemovalPaused      Kind = "removal-paused"
	RemovalKept        Kind = "removal-kept"
	LimitNear          Kind = "limit-near"
	CertificateInvalid Kind = "certificate-invalid"
	CertificateExpires Kind = "certificate-expires"
	FilesNotRenewed    Kind = "files-not-renewed"
	StateFailing       Kind = "state-failing"
	ReloadFailed       Kind = "reload-failed"
	ClockWrong         Kind = "clock-wrong"
	AccessRefused      Kind = "access-refused"
	ConnectionsRefused Kind = "connections-refused"
	NoSinks            Kind = "no-sinks"
	SinkLags           Kind = "sink-lags"
	SinkRefuses        Kind = "sink-refuses"
	ResponseTooLarge   Kind = "response-too-large"
	ObjectsNotWritten  Kind = "objects-not-written"
)

// Severity says who has to look, and when.
type Severity string

const (
	// Critical needs somebody now.
	Critical Severity = "critical"
	// Warning needs somebody today.
	Warning Severity = "warning"
	// Info is for when there is time.
	Info Severity = "info"
)

// rank orders severities, the worst first.
func (s Severity) rank() int {
	switch s {
	case Critical:
		return 0
	case Warning:
		return 1
	default:
		return 2
	}
}

// Definition is what all conditions of a kind have in common.
type Definition struct {
	Kind     Kind
	Severity Severity
	// Affects says what follows from it, and what does not.
	Affects string
	// Cure says what to do, unless the condition knows better.
	Cure string
	// Logged reports that no other line of the log speaks of it.
	Logged bool
}

// definitions are all kinds. Each has an alert and a section in the runbooks.
var definitions = []Definition{
	{TypesWaiting, Critical, "A sink that connects gets nothing of these types until the registry has listed; do not restart istiod.", "Bring the registry back, or set required: false for it and reload.", false},
	{RegistryNotLive, Warning, "Changes in this registry do not arrive. What is known is still served, and nothing is removed.", "Repair what the error names; neither the bridge nor istiod has to be restarted.", false},
	{RegistrySilent, Warning, "Changes in this registry may not arrive. What is known is still served.", "Ask the registry by hand. If it answers, its adapter hangs: end the plugin's process, which is started again.", false},
	{PluginRestarts, Warning, "Changes in this registry arrive late or not at all. What is known is still served.", "Read the plugin's own log lines before \"the plugin ended\".", false},
	{ListingIncomplete, Warning, "Nothing of this registry is removed until its listing is complete.", "If the registry has answered recently, it is large: wait. If not, end the plugin's process, which is started again.", false},
	{ServesRestored, Warning, "Sinks have this registry as it was before the bridge started.", "Bring the registry back; its first complete listing replaces what was restored.", false},
	{ServesWithout, Warning, "Sinks lack what only this registry has.", "Bring the registry back; what it lists is added.", false},
	{RemovalPaused, Critical, "What the registry no longer has is still served, until somebody decides or protect.hold is over.", "", false},
	{RemovalKept, Info, "What the registry no longer has is still served, as an operator decided.", "", false},
	{LimitNear, Warning, "What exceeds the limit is refused.", "Raise the limit, if you expect so much.", true},
	{CertificateInvalid, Critical, "Whoever verifies the certificate cannot connect.", "Renew the file; it is read again without a reload.", true},
	{CertificateExpires, Warning, "When it has expired, clients that verify it cannot connect.", "Renew the file; it is read again without a reload.", true},
	{FilesNotRenewed, Warning, "The previous content stays in use; a file that is missing or empty admits nobody.", "Repair the file that the error names.", false},
	{StateFailing, Warning, "Everything is served. A restart while a registry is down would begin with an older state, or none.", "Make room in state.dir, or let the bridge write there; it tries again within 30 seconds.", false},
	{ReloadFailed, Warning, "The previous configuration stays in force. A restart would fail with the file as it is.", "isthmus validate --config FILE shows each problem with its line.", false},
	{ClockWrong, Warning, "Certificates and tokens may be accepted or refused wrongly, and times in logs and pages are wrong.", "Synchronize the clock (NTP).", true},
	{AccessRefused, Warning, "These peers get nothing.", "", false},
	{ConnectionsRefused, Warning, "Sinks beyond the limit get nothing.", "The page /sinks shows who has so many; raise the limit if they are legitimate.", false},
	{NoSinks, Warning, "No sink receives what the bridge serves.", "Name this bridge's xDS address in configSources of istiod's mesh configuration; isthmus meshconfig prints it, and istiod's log says why it cannot connect.", false},
	{SinkLags, Warning, "Changes do not reach the mesh through this sink. Other sinks are not delayed.", "Look at the processor time and the log of the sink; end it if it hangs.", true},
	{SinkRefuses, Warning, "The sink keeps what it had before.", "Correct in the registry what its message names.", false},
	{ResponseTooLarge, Critical, "The sink ends the stream, reconnects and gets the same again, and no changes.", "Upgrade istiod to 1.12 or later, or give it several bridges with some of the registries each (for Pilot: --mcpMaxMsgSize).", false},
	{ObjectsNotWritten, Warning, "Programs that read Kubernetes have the former state of these services, or lack them. Sinks are not affected, and nothing is removed.", "Do what the API server's words ask for: a permission, a namespace, another name. It is tried again by itself; /api/v1/consumers lists the objects.", false},
}

// byKind has the definition of each kind.
var byKind = func() map[Kind]*Definition {
	out := make(map[Kind]*Definition, len(definitions))
	for i := range definitions {
		out[definitions[i].Kind] = &definitions[i]
	}
	return out
}()

// definition panics for a kind that is not defined.
func (k Kind) definition() *Definition {
	d := byKind[k]
	if d == nil {
		panic(fmt.Sprintf("BUG: conditions: kind %q is not defined", k))
	}
	return d
}

// Alert returns the name of the alert for the kind: "IsthmusRegistryNotLive".
func (k Kind) Alert() string {
	out := "Isthmus"
	for word := range strings.SplitSeq(string(k), "-") {
		out += strings.ToUpper(word[:1]) + word[1:]
	}
	return out
}

// runbooks is the page with a section for each alert.
const runbooks = "https://github.com/isthmus-mesh/isthmus/blob/main/docs/runbooks.md"

// Link returns the address of the section of the runbooks about the kind.
func (k Kind) Link() string { return runbooks + "#" + strings.ToLower(k.Alert()) }
