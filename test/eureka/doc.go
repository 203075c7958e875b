// Package eureka measures a change in a real Eureka server on its way to a
// sink.
package eureka
